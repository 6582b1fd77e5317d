"""Shows this user's runs in a browser, on loopback: answer, cancel, apply and rewind them there."""
