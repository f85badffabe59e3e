"""An optimizer's parameters as one flat vector: plain or sharded, and which part of it a rank exchanges."""
