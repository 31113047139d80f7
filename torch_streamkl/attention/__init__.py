"""`attention_kl`: the divergence between two attention maps."""
