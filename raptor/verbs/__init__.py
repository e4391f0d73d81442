"""One file a verb of the command: a typed function whose arguments are the options."""
