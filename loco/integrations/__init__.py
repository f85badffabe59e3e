"""loco in other people's trainers: a file for each framework, through loco's public names only."""
