"""Implements `attention_kl`, the divergence between the attention probabilities of two models."""
