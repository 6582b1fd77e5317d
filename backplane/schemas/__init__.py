"""JSON Schemas of every shape of the contract, and documents checked against them."""
