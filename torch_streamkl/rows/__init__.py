"""Row programs: sums over keys or vocabulary entries of any pointwise function of dot products,
streamed.
"""
