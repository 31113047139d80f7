"""Random calls of the operators against formulas written from their documentation alone."""
