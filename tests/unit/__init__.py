"""Pure logic: no network, no processes, no waiting."""
