# SPDX-License-Identifier: Apache-2.0
"""Pictures that are decoded at their first use and stay so: it ends with the first epoch."""
# /// truth
# leaks = false
# needs = ["PIL"]
# ///
import io

from PIL import Image

from watched import steps

PICTURES = 60
file = io.BytesIO()
Image.effect_noise((256, 256), 50).convert("RGB").save(file, "PNG")
pictures = [Image.open(io.BytesIO(file.getvalue())) for _ in range(PICTURES)]
for step in steps():
    pictures[step % PICTURES].load()
