"""Sites that come and go: a quorum for each round, and views of it."""
