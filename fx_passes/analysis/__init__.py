"""Finds out what every node of a region means, by one rule per operator overload."""
