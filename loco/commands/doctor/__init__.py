"""`python -m loco doctor`: what the sites of a run would meet, before it is started."""
