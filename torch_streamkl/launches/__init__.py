"""From shapes and device to a launch: limits of a GPU, tiles, tables, launches that repeat."""
