"""How near the parts of a round come to what the machine can do, and how long whole rounds take.

python -m experiments.bench                  all of it
python -m experiments.bench kernels          a round's own work, beside the memory's speed
python -m experiments.bench wire             bytes of an entry, and the speed of the codecs
python -m experiments.bench peers            whole rounds beside torchft's DiLoCo and an all-reduce
python -m experiments.bench link             rounds by each exchange and codec over slow links; as root
python -m experiments.bench sync             weights to inference workers: time, bytes, memory
"""
