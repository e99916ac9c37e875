"""What Lightning does in its own way, seen from here: loops, loggers, precision, schedules, checkpoints, processes."""
