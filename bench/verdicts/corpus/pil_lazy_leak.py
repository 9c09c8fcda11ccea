# SPDX-License-Identifier: Apache-2.0
"""Pictures that are turned by a random angle, each kept by picture and epoch."""
# /// truth
# leaks = true
# needs = ["PIL"]
# owners = ["native", "unexplained"]
# holder = "turned"
# ///
import io

from PIL import Image

from watched import steps

PICTURES = 60
file = io.BytesIO()
Image.effect_noise((256, 256), 50).convert("RGB").save(file, "PNG")
turned = {}
for step in steps():
    picture = Image.open(io.BytesIO(file.getvalue()))
    turned[step % PICTURES, step // PICTURES] = picture.rotate(step)  # site
