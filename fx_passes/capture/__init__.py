"""Selects the part of a Dynamo graph that can be analysed, and traces it to ATen."""
