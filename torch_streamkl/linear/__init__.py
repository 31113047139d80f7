"""Implements `linear_kl`, the divergence between two language models' heads."""
