"""A page over this user's runs, on loopback: seen, answered, cancelled and started in a browser."""
