"""What accompanies a training: checkpoints, the log, measurements and checks."""
