"""What a run measures of itself: tokens, time, memory, gradient norms, what its experts were given."""
