"""How ranks come to one state: proven alike at construction, given θ, brought together after lost links."""
