"""The model of a finished run: its file, predictions, evaluation and export."""
