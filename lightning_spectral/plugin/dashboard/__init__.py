"""What `RoundDashboard` shows: records of a round that do not depend on a logger, and writers for each logger."""
