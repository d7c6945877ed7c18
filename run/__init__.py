"""What accompanies training: checkpoints, the log, measurements and checks."""
