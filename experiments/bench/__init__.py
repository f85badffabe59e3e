"""How near the parts of a round come to what the machine can do.

python -m experiments.bench                  all of it
python -m experiments.bench kernels          a round's own work, beside the memory's speed
python -m experiments.bench wire             bytes of an entry beside their floor, and the codes' speed
python -m experiments.bench link             whole rounds over slow links, in network namespaces
python -m experiments.bench projection       the same for links and sizes that are not here, by arithmetic
"""
