"""How flow runs end otherwise than by themselves: signals, pauses, death."""
