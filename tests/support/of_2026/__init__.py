"""Holds losses as trainers of 2026 write them; importing the package registers them."""

from tests.support.of_2026 import cached, drafts, logits, maps
from tests.support.of_2026.registry import LOSSES as LOSSES

MODULES = (cached, drafts, logits, maps)
