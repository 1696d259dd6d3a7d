"""Where the ranks of an ordinary run meet, and what they can tell each other beside the tensors of a step."""
