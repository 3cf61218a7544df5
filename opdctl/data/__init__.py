"""Data as data: rows of a file or of a task, looked at, checked and converted before anything trains on them."""
