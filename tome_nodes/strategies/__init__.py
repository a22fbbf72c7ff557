"""How tokens are grouped: each strategy turns the features of a grid into a plan."""
