"""What bench.py measures: memory, time and checkpoints, one file each."""
