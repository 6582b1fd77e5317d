"""Check any program that claims to be a host, and any backend that claims an ability."""
