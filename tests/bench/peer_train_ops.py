# SPDX-License-Identifier: Apache-2.0
"""Times the libraries that PyTorch brings on the ops of training-throughput when measure.py says.

usage: peer_train_ops.py [--lock=FILE] [--search-seconds=12]

Requests and methods are those of peer_ops.py. cuDNN's plans and PyTorch's choice of them for the
gradients of convolutions; of a 1×1 one also cuBLAS. Attention's gradient by the deterministic
algorithms of flash, of the memory-efficient kernel and of cuDNN's graph API: what PyTorch itself calls
of cuDNN is not deterministic. One more op, "copy", with the shape of a group norm: it reads and writes
as many bytes as the norm's gradient.
"""
import contextlib

import torch
import torch.utils.deterministic

import peer
import peer_ops
from peer_ops import BF16, alike, image, kernel

aten = torch.ops.aten


@contextlib.contextmanager
def deterministic():
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


class ConvolutionGradients(peer_ops.Candidates):
    """dgrad and wgrad; padding 1 on all sides of a 3×3 convolution."""

    def __init__(self, library, op, rows, size, stride, **shape):
        self.library, self.of_weights = library, op == "wgrad"
        self.rows, self.size, self.out_size = rows, size, size // stride
        self.cin, self.cout, self.k = shape["in"], shape["out"], shape["kernel"]
        self.geometry = {"padding": self.k // 2, "stride": stride}
        self.weight = kernel(self.cout, self.cin, self.k)
        self.plan, self.details = None, {}

    def activations(self):
        """One set of what a launch reads."""
        made = {"dout": image(self.rows, self.cout, self.out_size)}
        if self.of_weights:
            made["x"] = image(self.rows, self.cin, self.size)
        return made

    def shape(self):
        """Of the gradient."""
        if self.of_weights:
            return tuple(self.weight.shape)
        return (self.rows, self.cin, self.size, self.size)

    def search(self):
        with self.library.alone():
            tensors = self.activations()
        if not self.of_weights:
            tensors["weight"] = self.weight
        self.plan, self.details["cuDNN"] = self.library.plan(
            "ConvolutionGradient", tensors, self.shape(), **self.geometry)

    def by_pytorch(self, dout, x):
        padding, stride = [self.geometry["padding"]] * 2, [self.geometry["stride"]] * 2
        with deterministic():
            found = aten.convolution_backward(
                dout, x, self.weight, None, stride, padding, [1, 1], False, [0, 0], 1,
                [not self.of_weights, self.of_weights, False])
        return found[1 if self.of_weights else 0]

    def by_cublas(self, dout, x):
        """Of a 1×1 convolution: all matrices are views."""
        dout = dout.permute(0, 2, 3, 1).reshape(-1, self.cout)
        if self.of_weights:
            x = x.permute(0, 2, 3, 1).reshape(-1, self.cin)
            return (dout.t() @ x).view(self.cout, self.cin, 1, 1)
        dx = dout @ self.weight.view(self.cout, self.cin)
        return dx.view(self.rows, self.size, self.size, self.cin).permute(0, 3, 1, 2)

    def candidates(self):
        gradient = self.rows * self.size**2 * self.cin + self.rows * self.out_size**2 * self.cout
        copies = peer.copies_for(2 * (gradient + (self.weight.numel() if self.of_weights else 0)))
        sets = {name: alike(copies, tensor) for name, tensor in self.activations().items()}
        # Of x, dgrad only needs the shape.
        xs = sets["x"] if self.of_weights else [image(self.rows, self.cin, self.size)] * copies
        douts = sets["dout"]
        found = {"cuDNN, PyTorch's choice": lambda i: self.by_pytorch(douts[i], xs[i])}
        if self.k == 1:
            found["cuBLAS"] = lambda i: self.by_cublas(douts[i], xs[i])
        if self.plan and self.of_weights:
            found["cuDNN"] = lambda i: self.plan(dout=douts[i], x=xs[i])
        elif self.plan:
            found["cuDNN"] = lambda i: self.plan(dout=douts[i], weight=self.weight)
        return found, copies


class GroupNormGradients(peer_ops.Candidates):
    """Of group norm and SiLU: (dx, dgamma, dbeta)."""

    def __init__(self, library, _op, rows, size, channels, groups):
        self.library, self.image, self.groups = library, (rows, channels, size), groups
        self.gamma, self.beta = torch.randn(channels, **BF16), torch.randn(channels, **BF16)
        self.details, self.compiled = {}, None

    def activations(self):
        """x, dout, and of the forward op z (what SiLU is applied to), mean and rstd."""
        rows, channels, size = self.image
        x = image(*self.image)
        z, mean, rstd = aten.native_group_norm(x.contiguous(), self.gamma, self.beta, rows,
                                               channels, size**2, self.groups, 1e-5)
        return x, image(*self.image), z, mean, rstd

    def through_both(self, x, dout, z, mean, rstd):
        rows, channels, size = self.image
        return aten.native_group_norm_backward(
            aten.silu_backward(dout, z), x, mean, rstd, self.gamma, rows, channels, size**2,
            self.groups, [True, True, True])

    def eager(self, x, dout, z, mean, rstd):
        """As autograd calls them."""
        return self.through_both(x.contiguous(), dout.contiguous(), z, mean, rstd)

    def from_x(self, x, dout, mean, rstd):
        """As torch.compile's backward: z is computed again, not read."""
        rows, channels, size = self.image
        grouped = x.reshape(rows, self.groups, channels // self.groups, size, size)
        normed = (grouped - mean.view(rows, -1, 1, 1, 1)) * rstd.view(rows, -1, 1, 1, 1)
        z = normed.reshape(x.shape) * self.gamma.view(1, -1, 1, 1) + self.beta.view(1, -1, 1, 1)
        return self.through_both(x, dout, z, mean, rstd)

    def search(self):
        with self.library.alone():
            x, dout, _, mean, rstd = self.activations()
        self.compiled = peer.compiled(self.from_x, x, dout, mean, rstd)

    def candidates(self):
        rows, channels, size = self.image
        copies = peer.copies_for(3 * 2 * rows * size**2 * channels)
        x, dout, z, mean, rstd = self.activations()
        xs, douts, zs = (alike(copies, tensor) for tensor in (x, dout, z))
        found = {"PyTorch eager": lambda i: self.eager(xs[i], douts[i], zs[i], mean, rstd)}
        if self.compiled:
            found["torch.compile"] = lambda i: self.compiled(xs[i], douts[i], mean, rstd)
        return found, copies


class Copies(peer_ops.Candidates):
    """As many bytes as the gradient of a group norm with this shape: two images read, one written."""

    def __init__(self, _library, _op, rows, size, channels, groups):
        del groups
        self.elements = 3 * rows * size**2 * channels // 2
        self.details = {}

    def search(self):
        pass

    def candidates(self):
        copies = peer.copies_for(2 * 2 * self.elements)
        xs = alike(copies, torch.randn(self.elements, **BF16))
        # No copy, which in a graph is a node of its own kind, and slower.
        return {"one pass": lambda i: -xs[i]}, copies


def made_at_first(make):
    """make() gives a function of a copy's index. It is called in the first run, before a capture."""
    made = []

    def run(i):
        if not made:
            made.append(make())
        return made[0](i)

    return run


class AttentionGradients(peer_ops.Candidates):
    """(dq, dk, dv). q, k and v lie side by side, as a fused projection leaves them."""

    must_repeat = True

    def __init__(self, library, _op, rows, heads, tokens, dim):
        self.library, self.shape = library, (rows, tokens, 3, heads, dim)
        self.plan, self.details = None, {}

    def activations(self, copies):
        """q, k, v and dout of each copy."""
        rows, tokens, _, heads, dim = self.shape
        qkvs = alike(copies, torch.randn(self.shape, **BF16))
        douts = alike(copies, torch.randn(rows, tokens, heads, dim, **BF16))
        return [(*qkv.permute(2, 0, 3, 1, 4), dout.transpose(1, 2))
                for qkv, dout in zip(qkvs, douts)]

    def for_cudnn(self, q, k, v, dout):
        """What its plan reads, by its names."""
        o, log_sum_exp = aten._scaled_dot_product_flash_attention(q, k, v)[:2]
        return {"q": q, "k": k, "v": v, "o": o, "dout": dout,
                "stats": log_sum_exp.unsqueeze(-1)}

    def search(self):
        with self.library.alone():
            tensors = self.for_cudnn(*self.activations(1)[0])
        self.plan, self.details["cuDNN, deterministic"] = self.library.plan(
            "AttentionGradient", tensors, self.shape[-1] ** -0.5)

    def candidates(self):
        rows, tokens, _, heads, dim = self.shape
        copies = peer.copies_for(2 * 8 * rows * tokens * heads * dim)
        sets = self.activations(copies)

        def flash():
            saved = [aten._scaled_dot_product_flash_attention(q, k, v) for q, k, v, _ in sets]

            def run(i):
                q, k, v, dout = sets[i]
                out, log_sum_exp, cum_q, cum_k, max_q, max_k, seed, offset, _ = saved[i]
                with deterministic():
                    return aten._scaled_dot_product_flash_attention_backward(
                        dout, q, k, v, out, log_sum_exp, cum_q, cum_k, max_q, max_k, 0.0, False,
                        seed, offset)

            return run

        def efficient():
            saved = [aten._scaled_dot_product_efficient_attention(q, k, v, None, True)
                     for q, k, v, _ in sets]

            def run(i):
                q, k, v, dout = sets[i]
                with deterministic():
                    return aten._scaled_dot_product_efficient_attention_backward(
                        dout, q, k, v, None, *saved[i], 0.0, [True, True, True, False])[:3]

            return run

        def cudnn():
            saved = [self.for_cudnn(*each) for each in sets]
            return lambda i: self.plan(**saved[i])

        found = {"flash": made_at_first(flash), "efficient": made_at_first(efficient)}
        if self.plan:
            found["cuDNN"] = made_at_first(cudnn)
        return found, copies


OPS = {"dgrad": ConvolutionGradients, "wgrad": ConvolutionGradients,
       "group_norm_silu_backward": GroupNormGradients, "copy": Copies,
       "attention_backward": AttentionGradients}

if __name__ == "__main__":
    # Otherwise whatever a deterministic op allocates is filled with NaN first.
    torch.utils.deterministic.fill_uninitialized_memory = False
    peer_ops.main(OPS)
