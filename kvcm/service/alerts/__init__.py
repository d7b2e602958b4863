"""What is wrong now, why, and what to do: pure functions over what a manager knows, and a watch that gathers it."""
