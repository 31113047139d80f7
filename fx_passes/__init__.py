"""Rewrites Dynamo graphs so that distillation losses call the streaming operators."""
