"""What a terminal shows: help, completion, and streams that break."""
