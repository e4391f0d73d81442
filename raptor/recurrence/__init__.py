"""What a recurrent view of depth is good for: fewer steps for easy images, watching a model, editing, correcting."""
