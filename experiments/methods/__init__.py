"""What is compared: PULSELoCo and DiLoCo, SparseLoCo, and variants of them."""
