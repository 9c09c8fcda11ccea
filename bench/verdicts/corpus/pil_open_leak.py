# SPDX-License-Identifier: Apache-2.0
"""Pictures opened with Pillow, loaded and kept."""
# /// truth
# leaks = true
# needs = ["PIL"]
# owners = ["native", "unexplained"]
# holder = "pictures|Image"
# ///
import io

from PIL import Image

from watched import steps

file = io.BytesIO()
Image.effect_noise((256, 256), 50).convert("RGB").save(file, "PNG")
pictures = []
for step in steps():
    picture = Image.open(io.BytesIO(file.getvalue()))
    picture.load()  # site
    pictures.append(picture)
