"""Programs that once compiled to something else than eager code: each stands for its class.

A file has what one search found (docs/evidence/soundness.md tells who searched, and how).
"""
