"""What `RoundDashboard` shows: records of a round that know no logger, and what puts them into one."""
