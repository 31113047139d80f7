"""The one representation of what is computed: an expression graph and what is known of it."""
