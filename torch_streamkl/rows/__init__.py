"""Row programs: sums over keys or words of any pointwise function of dot products, streamed."""
