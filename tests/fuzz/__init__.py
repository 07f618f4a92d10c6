"""Fuzzer of the public ops: random calls, right ones and wrong ones, judged by float64 formulas.

::

    python -m tests.fuzz --seeds 10000                     # references, about 100 seeds a second
    python -m tests.fuzz --first 1234 --seeds 1            # one seed again
    python -m tests.fuzz --op gemm --op gemv --minutes 5   # some ops, as long as that
    python -m tests.fuzz --emulated --seeds 300            # sm_100 kernels, about 2 seeds a second

A seed chooses an op, and draws its arguments from the domain that the op documents: shapes, strides
(views of wider tensors, odd strides where a size is 1), dtypes, layouts, numbers of terms, scales
up to the ends of float32, NaN where it is said what comes of it, experts of no rank, pages in any
order with NaN where no key is. The result must be one that the formula explains: to the bit where
an op's documentation says so, else within what its roundings allow (``bounds``). Formulas are in
float64 and know the arguments alone. They share with the references what lays scales and fragments
out, ``Activation``, and of the routing that products are given the reference of ``moe_route``; of
attention that rotates, stores and quantises they ask the ops that it stands for.

In four of ten seeds one argument is then broken: another dtype, rank or length, a stride, a
misaligned start, an odd element, a number out of range, None, text. The op must refuse it with an
``InvalidArgument`` (or torch with its signature's error) that names the argument, or one that it no
longer fits, or take it and give what the formula says of it. Any other exception is a finding.

``--emulated`` draws small calls, and runs the op's sm_100 kernel in the emulator, in a schedule
that the seed decides; what a GPU documents not to take may be refused. Of attention, what has to be
refused is known: that, by name, and nothing else. Its draws are products of every head size, 16-bit
or FP8 keys, a result in 16 bits or NVFP4, keys that warps or CTAs split, and rows around what
either has room for.

A finding is a line that begins with the command that repeats it; the exit status is then 1. What a
seed draws depends on the seed and the op alone; with ``--op`` the op depends on the list too.
The table at the end counts, for each op: results compared; wrong arguments refused by name;
``refused by another``, whose message begins with an argument that the broken one no longer fits;
and ``shapes alone``: a tensor without a device, of which torch asks an op for shapes only.

Not judged: results of a sequence with NaN among its keys, of which attention says nothing.

    draw.py ops.py describe.py     what a seed draws, what an op is, arguments in a line
    bounds.py                      what roundings allow; NVFP4 between two values
    rows.py products.py experts.py routers.py attention.py caches.py indexer.py      the ops
    attention_draw.py              what attention and the ops of a cache are asked
    wrong.py run.py                one argument broken; seeds, verdicts, table
"""
