"""A second GR00T N1.7, from its specification alone: one sample at a time, plain loops, weights by released names, fp64.

It imports nothing of the project. Everything is as slow and as literal as possible.

Shape legend: S token slots, M image tokens, H hidden (of states: history), D state dimensions, T action steps, A action
dimensions, Y X pixel rows and columns, C channels.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

VISUAL, TEXT = "backbone.model.model.visual.", "backbone.model.model.language_model."
HEAD = "action_head."
DIT = "action_head.model."


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """Everything that tensor shapes do not tell, and what they do tell where it reads better."""

    patch: int
    vision_width: int
    vision_layers: int
    vision_heads: int
    vision_ffn: int
    table_side: int
    deepstack: tuple[int, ...]
    text_layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_width: int
    text_ffn: int
    vocabulary: int
    theta: float
    sections: tuple[int, int, int]
    vl_layers: int
    vl_heads: int
    vl_ffn: int
    dit_layers: int
    dit_heads: int
    dit_head_width: int
    dit_ffn: int
    text_every: int
    head_hidden: int
    embodiments: int
    state_dim: int
    state_history: int
    action_dim: int
    positions: int
    buckets: int
    image_token: int
    mask_vl: bool
    mask_padded: bool


@dataclass(frozen=True, kw_only=True)
class Sample:
    """One sample. images: uint8 [height, width, 3]; loss_mask bool [T, A]; dim_is_real bool [A]."""

    tokens: list[int]
    is_valid: list[bool]
    images: list[Tensor]
    state_HD: Tensor
    state_is_dropped: bool
    embodiment: int
    actions_TA: Tensor
    noise_TA: Tensor
    loss_mask_TA: Tensor
    dim_is_real_A: Tensor
    time: Tensor  # fp32 []


def shapes(z: Sizes) -> dict[str, tuple[int, ...]]:
    """Released names and shapes."""
    found: dict[str, tuple[int, ...]] = {}

    def linear(name: str, inputs: int, outputs: int, bias: bool = True) -> None:
        found[f"{name}.weight"] = (outputs, inputs)
        if bias:
            found[f"{name}.bias"] = (outputs,)

    def norm(name: str, width: int, bias: bool = True) -> None:
        found[f"{name}.weight"] = (width,)
        if bias:
            found[f"{name}.bias"] = (width,)

    def category(name: str, inputs: int, outputs: int) -> None:
        found[f"{name}.W"], found[f"{name}.b"] = (z.embodiments, inputs, outputs), (z.embodiments, outputs)

    width = z.dit_heads * z.dit_head_width
    found[f"{VISUAL}patch_embed.proj.weight"] = (z.vision_width, 3, 2, z.patch, z.patch)
    found[f"{VISUAL}patch_embed.proj.bias"] = (z.vision_width,)
    found[f"{VISUAL}pos_embed.weight"] = (z.table_side**2, z.vision_width)
    for n in range(z.vision_layers):
        block = f"{VISUAL}blocks.{n}."
        norm(f"{block}norm1", z.vision_width)
        norm(f"{block}norm2", z.vision_width)
        linear(f"{block}attn.qkv", z.vision_width, 3 * z.vision_width)
        linear(f"{block}attn.proj", z.vision_width, z.vision_width)
        linear(f"{block}mlp.linear_fc1", z.vision_width, z.vision_ffn)
        linear(f"{block}mlp.linear_fc2", z.vision_ffn, z.vision_width)
    mergers = {"merger": z.vision_width, **{f"deepstack_merger_list.{n}": 4 * z.vision_width for n in range(len(z.deepstack))}}
    for name, norm_width in mergers.items():
        norm(f"{VISUAL}{name}.norm", norm_width)
        linear(f"{VISUAL}{name}.linear_fc1", 4 * z.vision_width, 4 * z.vision_width)
        linear(f"{VISUAL}{name}.linear_fc2", 4 * z.vision_width, z.hidden)
    found[f"{TEXT}embed_tokens.weight"] = (z.vocabulary, z.hidden)
    norm(f"{TEXT}norm", z.hidden, bias=False)
    for n in range(z.text_layers):
        layer = f"{TEXT}layers.{n}."
        for name in ("input_layernorm", "post_attention_layernorm"):
            norm(f"{layer}{name}", z.hidden, bias=False)
        for name in ("q_norm", "k_norm"):
            norm(f"{layer}self_attn.{name}", z.head_width, bias=False)
        linear(f"{layer}self_attn.q_proj", z.hidden, z.heads * z.head_width, bias=False)
        for name in ("k_proj", "v_proj"):
            linear(f"{layer}self_attn.{name}", z.hidden, z.kv_heads * z.head_width, bias=False)
        linear(f"{layer}self_attn.o_proj", z.heads * z.head_width, z.hidden, bias=False)
        for name in ("gate_proj", "up_proj"):
            linear(f"{layer}mlp.{name}", z.hidden, z.text_ffn, bias=False)
        linear(f"{layer}mlp.down_proj", z.text_ffn, z.hidden, bias=False)
    norm(f"{HEAD}vlln", z.hidden)
    for n in range(z.vl_layers):
        layer = f"{HEAD}vl_self_attention.transformer_blocks.{n}."
        norm(f"{layer}norm1", z.hidden)
        norm(f"{layer}norm3", z.hidden)
        for name in ("to_q", "to_k", "to_v", "to_out.0"):
            linear(f"{layer}attn1.{name}", z.hidden, z.hidden)
        linear(f"{layer}ff.net.0.proj", z.hidden, z.vl_ffn)
        linear(f"{layer}ff.net.2", z.vl_ffn, z.hidden)
    category(f"{HEAD}state_encoder.layer1", z.state_dim * z.state_history, z.head_hidden)
    category(f"{HEAD}state_encoder.layer2", z.head_hidden, width)
    category(f"{HEAD}action_encoder.W1", z.action_dim, width)
    category(f"{HEAD}action_encoder.W2", 2 * width, width)
    category(f"{HEAD}action_encoder.W3", width, width)
    category(f"{HEAD}action_decoder.layer1", z.head_hidden, z.head_hidden)
    category(f"{HEAD}action_decoder.layer2", z.head_hidden, z.action_dim)
    found[f"{HEAD}position_embedding.weight"] = (z.positions, width)
    linear(f"{DIT}timestep_encoder.timestep_embedder.linear_1", 256, width)
    linear(f"{DIT}timestep_encoder.timestep_embedder.linear_2", width, width)
    for n in range(z.dit_layers):
        block = f"{DIT}transformer_blocks.{n}."
        linear(f"{block}norm1.linear", width, 2 * width)
        read = z.hidden if n % 2 == 0 else width
        for name, inputs in (("to_q", width), ("to_k", read), ("to_v", read), ("to_out.0", width)):
            linear(f"{block}attn1.{name}", inputs, width)
        linear(f"{block}ff.net.0.proj", width, z.dit_ffn)
        linear(f"{block}ff.net.2", z.dit_ffn, width)
    linear(f"{DIT}proj_out_1", width, 2 * width)
    linear(f"{DIT}proj_out_2", width, z.head_hidden)
    return found


class Reference:
    """The model on fp64 weights by released names."""

    def __init__(self, sizes: Sizes, weights: Mapping[str, Tensor]) -> None:
        self.z = sizes
        self.w = weights

    def linear(self, name: str, x: Tensor) -> Tensor:
        y = x @ self.w[f"{name}.weight"].T
        return y + self.w[f"{name}.bias"] if f"{name}.bias" in self.w else y

    def layer_norm(self, name: str, x: Tensor, epsilon: float) -> Tensor:
        return normalized(x, epsilon) * self.w[f"{name}.weight"] + self.w[f"{name}.bias"]

    def rms_norm(self, name: str, x: Tensor) -> Tensor:
        return x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt() * self.w[f"{name}.weight"]

    def category(self, name: str, x: Tensor, embodiment: int, weight: str = "W") -> Tensor:
        return x @ self.w[f"{name}.W"][embodiment] + self.w[f"{name}.b"][embodiment]

    def vision(self, image_YXC: Tensor) -> tuple[Tensor, list[Tensor]]:
        """(tokens [M, H], deepstack features) of one image."""
        z, frame = self.z, ((image_YXC.double() / 255 - 0.5) / 0.5).permute(2, 0, 1)
        video = torch.stack((frame, frame), dim=1)[None]
        embedded = F.conv3d(
            video, self.w[f"{VISUAL}patch_embed.proj.weight"], self.w[f"{VISUAL}patch_embed.proj.bias"], (2, z.patch, z.patch)
        )[0, :, 0]
        rows, columns = embedded.shape[1:]
        places = [
            (2 * block_row + y, 2 * block_column + x)
            for block_row in range(rows // 2)
            for block_column in range(columns // 2)
            for y in range(2)
            for x in range(2)
        ]
        x = torch.stack([embedded[:, r, c] + self.position(r, rows, c, columns) for r, c in places])
        width = z.vision_width // z.vision_heads
        frequencies = [10000.0 ** (-2 * i / (width // 2)) for i in range(width // 4)]
        angles = [[r * f for f in frequencies] + [c * f for f in frequencies] for r, c in places]
        deepstack = []
        for n in range(z.vision_layers):
            block = f"{VISUAL}blocks.{n}."
            qkv = self.linear(f"{block}attn.qkv", self.layer_norm(f"{block}norm1", x, 1e-6)).unflatten(
                -1, (3, z.vision_heads, -1)
            )
            heads = []
            for head in range(z.vision_heads):
                q, k, v = qkv[:, :, head].unbind(1)
                heads.append(attention(rotated(q, angles), rotated(k, angles), v, None))
            x = x + self.linear(f"{block}attn.proj", torch.cat(heads, -1))
            inner = F.gelu(self.linear(f"{block}mlp.linear_fc1", self.layer_norm(f"{block}norm2", x, 1e-6)), approximate="tanh")
            x = x + self.linear(f"{block}mlp.linear_fc2", inner)
            if n in z.deepstack:
                name = f"{VISUAL}deepstack_merger_list.{z.deepstack.index(n)}"
                deepstack.append(self.merged(name, self.layer_norm(f"{name}.norm", x.reshape(len(places) // 4, -1), 1e-6)))
        name = f"{VISUAL}merger"
        return self.merged(name, self.layer_norm(f"{name}.norm", x, 1e-6).reshape(len(places) // 4, -1)), deepstack

    def merged(self, name: str, x: Tensor) -> Tensor:
        return self.linear(f"{name}.linear_fc2", F.gelu(self.linear(f"{name}.linear_fc1", x)))

    def position(self, row: int, rows: int, column: int, columns: int) -> Tensor:
        """Bilinear look-up in the square table, corners aligned."""
        last, table = self.z.table_side - 1, self.w[f"{VISUAL}pos_embed.weight"]
        y, x = row * last / (rows - 1), column * last / (columns - 1)
        total = torch.zeros(table.shape[1], dtype=torch.float64)
        for cell_y, share_y in ((math.floor(y), 1 - (y - math.floor(y))), (math.floor(y) + 1, y - math.floor(y))):
            for cell_x, share_x in ((math.floor(x), 1 - (x - math.floor(x))), (math.floor(x) + 1, x - math.floor(x))):
                total = total + share_y * share_x * table[min(cell_y, last) * self.z.table_side + min(cell_x, last)]
        return total

    def token_positions(self, sample: Sample) -> list[tuple[int, int, int]]:
        """(temporal, row, column) of each slot."""
        found: list[tuple[int, int, int]] = []
        current, image, left = 0, 0, []
        for token, is_valid in zip(sample.tokens, sample.is_valid, strict=True):
            if not is_valid:
                found.append((0, 0, 0))
                continue
            if token == self.z.image_token:
                if not left:
                    side = 2 * self.z.patch
                    height, width = (n // side for n in sample.images[image].shape[:2])
                    left = [(current, current + y, current + x) for y in range(height) for x in range(width)]
                    current, image = current + max(height, width), image + 1
                found.append(left.pop(0))
                continue
            found.append((current, current, current))
            current += 1
        return found

    def backbone(self, sample: Sample) -> Tensor:
        """Features [S, H] of the last layer, before the final norm."""
        z, tokens, features = self.z, [], [[] for _ in self.z.deepstack]
        for image in sample.images:
            own, deep = self.vision(image)
            tokens.append(own)
            for collected, feature in zip(features, deep, strict=True):
                collected.append(feature)
        image_slots = [n for n, token in enumerate(sample.tokens) if token == z.image_token and sample.is_valid[n]]
        rows = list(self.w[f"{TEXT}embed_tokens.weight"][sample.tokens])
        for slot, row in zip(image_slots, torch.cat(tokens), strict=True):
            rows[slot] = row
        x, angles = torch.stack(rows), []
        for position in self.token_positions(sample):
            own_angles = []
            for k in range(z.head_width // 2):
                axis = next((a for a in (1, 2) if k % 3 == a and k < 3 * z.sections[a]), 0)
                own_angles.append(position[axis] * z.theta ** (-2 * k / z.head_width))
            angles.append(own_angles)
        slots = range(len(sample.tokens))
        may_read = torch.tensor([[b <= a and sample.is_valid[b] for b in slots] for a in slots])
        for n in range(z.text_layers):
            x = self.text_layer(f"{TEXT}layers.{n}.", x, angles, may_read)
            if n < len(z.deepstack):
                rows = list(x)
                for slot, row in zip(image_slots, torch.cat(features[n]), strict=True):
                    rows[slot] = rows[slot] + row
                x = torch.stack(rows)
        return x

    def text_layer(self, layer: str, x: Tensor, angles: list[list[float]], may_read: Tensor) -> Tensor:
        z, n = self.z, self.rms_norm(f"{layer}input_layernorm", x)
        heads = []
        for head in range(z.heads):
            own = slice(head * z.head_width, (head + 1) * z.head_width)
            group = head // (z.heads // z.kv_heads)
            shared = slice(group * z.head_width, (group + 1) * z.head_width)
            q = self.rms_norm(f"{layer}self_attn.q_norm", self.linear(f"{layer}self_attn.q_proj", n)[:, own])
            k = self.rms_norm(f"{layer}self_attn.k_norm", self.linear(f"{layer}self_attn.k_proj", n)[:, shared])
            v = self.linear(f"{layer}self_attn.v_proj", n)[:, shared]
            heads.append(attention(rotated(q, angles), rotated(k, angles), v, may_read))
        x = x + self.linear(f"{layer}self_attn.o_proj", torch.cat(heads, -1))
        n = self.rms_norm(f"{layer}post_attention_layernorm", x)
        gate = F.silu(self.linear(f"{layer}mlp.gate_proj", n)) * self.linear(f"{layer}mlp.up_proj", n)
        return x + self.linear(f"{layer}mlp.down_proj", gate)

    def heads_of(self, name: str, heads: int, x: Tensor, memory: Tensor) -> Tensor:
        """Attention with biases: what x reads from memory."""
        q, k, v = (self.linear(f"{name}.{part}", y) for part, y in (("to_q", x), ("to_k", memory), ("to_v", memory)))
        width = q.shape[-1] // heads
        cut = [slice(head * width, (head + 1) * width) for head in range(heads)]
        return self.linear(f"{name}.to_out.0", torch.cat([attention(q[:, c], k[:, c], v[:, c], None) for c in cut], -1))

    def feed_forward(self, name: str, x: Tensor) -> Tensor:
        return self.linear(f"{name}.net.2", F.gelu(self.linear(f"{name}.net.0.proj", x), approximate="tanh"))

    def memory(self, sample: Sample) -> tuple[Tensor, Tensor]:
        """(text tokens, image tokens) that the DiT reads."""
        x = self.layer_norm(f"{HEAD}vlln", self.backbone(sample), 1e-5)
        is_valid = torch.tensor(sample.is_valid)
        for n in range(self.z.vl_layers):
            layer = f"{HEAD}vl_self_attention.transformer_blocks.{n}."
            normed = self.layer_norm(f"{layer}norm1", x, 1e-5)
            read = normed[is_valid] if self.z.mask_vl else normed
            x = x + self.heads_of(f"{layer}attn1", self.z.vl_heads, normed, read)
            x = x + self.feed_forward(f"{layer}ff", self.layer_norm(f"{layer}norm3", x, 1e-5))
        is_image = torch.tensor([token == self.z.image_token for token in sample.tokens]) & is_valid
        return x[~is_image & is_valid], x[is_image]

    def velocity(self, sample: Sample, memory: tuple[Tensor, Tensor], x_TA: Tensor, step: int) -> Tensor:
        """Predicted velocity [T, A] at an integer time step."""
        z, own = self.z, sample.embodiment
        if z.mask_padded:
            x_TA = torch.where(sample.dim_is_real_A, x_TA, 0.0)
        width = z.dit_heads * z.dit_head_width
        state = self.category(f"{HEAD}state_encoder.layer1", sample.state_HD.double().reshape(1, -1), own)
        state = self.category(f"{HEAD}state_encoder.layer2", F.relu(state), own)
        if sample.state_is_dropped:
            state = torch.zeros_like(state)
        angles = [step * math.exp(-j * math.log(10000) / (width // 2)) for j in range(width // 2)]
        code = torch.tensor([math.sin(a) for a in angles] + [math.cos(a) for a in angles], dtype=torch.float64)
        actions = self.category(f"{HEAD}action_encoder.W1", x_TA, own)
        actions = self.category(f"{HEAD}action_encoder.W2", torch.cat((actions, code.expand(len(actions), -1)), -1), own)
        actions = self.category(f"{HEAD}action_encoder.W3", actions * torch.sigmoid(actions), own)
        actions = actions + self.w[f"{HEAD}position_embedding.weight"][: len(actions)]
        x = torch.cat((state, actions))
        angles = [step * math.exp(-i * math.log(10000) / 127) for i in range(128)]
        code = torch.tensor([math.cos(a) for a in angles] + [math.sin(a) for a in angles], dtype=torch.float64)
        embedder = f"{DIT}timestep_encoder.timestep_embedder."
        temb = F.silu(self.linear(f"{embedder}linear_2", F.silu(self.linear(f"{embedder}linear_1", code))))
        for n in range(z.dit_layers):
            block = f"{DIT}transformer_blocks.{n}."
            scale, shift = self.linear(f"{block}norm1.linear", temb).chunk(2)
            normed = normalized(x, 1e-5) * (1 + scale) + shift
            read = normed if n % 2 else memory[0 if n % (2 * z.text_every) == 0 else 1]
            x = x + self.heads_of(f"{block}attn1", z.dit_heads, normed, read)
            x = x + self.feed_forward(f"{block}ff", normalized(x, 1e-5))
        shift, scale = self.linear(f"{DIT}proj_out_1", temb).chunk(2)
        x = self.linear(f"{DIT}proj_out_2", normalized(x, 1e-6) * (1 + scale) + shift)
        x = self.category(f"{HEAD}action_decoder.layer2", F.relu(self.category(f"{HEAD}action_decoder.layer1", x, own)), own)
        return x[1:]

    def loss(self, samples: list[Sample]) -> Tensor:
        """The released loss of a batch."""
        total, count = torch.zeros((), dtype=torch.float64), 0
        for sample in samples:
            t, noise, actions = sample.time.double(), sample.noise_TA.double(), sample.actions_TA.double()
            step = int(torch.floor(sample.time * self.z.buckets))
            predicted = self.velocity(sample, self.memory(sample), (1 - t) * noise + t * actions, step)
            error = (predicted - (actions - noise)).square()
            total, count = total + error[sample.loss_mask_TA].sum(), count + int(sample.loss_mask_TA.sum())
        return total / (count + 1e-6)

    def actions(self, sample: Sample, num_steps: int) -> Tensor:
        """Sampled actions [T, A] from the sample's noise."""
        memory, x = self.memory(sample), sample.noise_TA.double()
        for k in range(num_steps):
            x = x + self.velocity(sample, memory, x, int(k / num_steps * self.z.buckets)) / num_steps
        return x


def normalized(x: Tensor, epsilon: float) -> Tensor:
    centred = x - x.mean(-1, keepdim=True)
    return centred / (centred.square().mean(-1, keepdim=True) + epsilon).sqrt()


def rotated(x: Tensor, angles: list[list[float]]) -> Tensor:
    """Rows of x turned by their angles, halves apart."""
    table = torch.tensor(angles, dtype=torch.float64)
    one, two = x.chunk(2, -1)
    return torch.cat((one * table.cos() - two * table.sin(), two * table.cos() + one * table.sin()), -1)


def attention(q: Tensor, k: Tensor, v: Tensor, may_read: Tensor | None) -> Tensor:
    """One head, query by query; a query that may read nothing gets zeros."""
    rows = []
    for n, query in enumerate(q):
        allowed = torch.ones(len(k), dtype=torch.bool) if may_read is None else may_read[n]
        if not allowed.any():
            rows.append(torch.zeros(v.shape[-1], dtype=v.dtype))
            continue
        share = torch.softmax(k[allowed] @ query / math.sqrt(q.shape[-1]), 0)
        rows.append(share @ v[allowed])
    return torch.stack(rows)
