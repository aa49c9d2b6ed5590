// SPDX-License-Identifier: Apache-2.0
// Paints the part of a picture that is drawn anew: with a pointer, or with the arrow keys and the space bar.
import {$, h, put} from "./dom.js";

const kTint = "rgb(226, 60, 120)";

/** A PNG of the picture's size, white where it was painted; null for no mask, undefined if cancelled. */
export async function paintMask(start, mask) {
  const dialog = $("mask-dialog");
  const {width, height} = start;
  const picture = new Image();
  picture.src = start.url;
  await picture.decode();
  const layer = h("canvas", {width, height});  // opaque where painted
  const paint = layer.getContext("2d");
  if (mask) {
    const old = new Image();
    old.src = mask.url;
    await old.decode();
    paint.drawImage(old, 0, 0);
    const pixels = paint.getImageData(0, 0, width, height);
    for (let i = 0; i < pixels.data.length; i += 4) pixels.data[i + 3] = pixels.data[i];
    paint.putImageData(pixels, 0, 0);
  }
  const canvas = h("canvas", {width, height, tabindex: 0, role: "application", class: "paint",
    "aria-label": "The picture", "aria-describedby": "mask-keys"});
  canvas.style.aspectRatio = `${width} / ${height}`;  // no bars beside it: a pointer's place is a pixel's
  canvas.style.width = `min(100%, ${58 * width / height}vh)`;
  const view = canvas.getContext("2d");
  const brush = h("input", {type: "range", id: "brush", min: 1, max: Math.round(Math.max(width, height) / 3),
    value: Math.max(2, Math.round(Math.max(width, height) / 10))});
  const erase = h("input", {type: "checkbox", id: "erase"});
  let at = {x: width / 2, y: height / 2}, from = null, keys = false;

  const show = () => {
    view.clearRect(0, 0, width, height);
    view.drawImage(picture, 0, 0, width, height);
    const tint = h("canvas", {width, height});
    const context = tint.getContext("2d");
    context.drawImage(layer, 0, 0);
    context.globalCompositeOperation = "source-in";
    context.fillStyle = kTint;
    context.fillRect(0, 0, width, height);
    view.globalAlpha = 0.6;
    view.drawImage(tint, 0, 0);
    view.globalAlpha = 1;
    if (keys) {
      view.lineWidth = Math.max(1, width / 200);
      for (const color of ["#000", "#fff"]) {
        view.strokeStyle = color;
        view.setLineDash(color === "#fff" ? [view.lineWidth * 3, view.lineWidth * 3] : []);
        view.beginPath();
        view.arc(at.x, at.y, brush.value / 2, 0, 2 * Math.PI);
        view.stroke();
      }
    }
  };
  const stroke = (to, remove = erase.checked) => {
    paint.globalCompositeOperation = remove ? "destination-out" : "source-over";
    paint.lineCap = paint.lineJoin = "round";
    paint.strokeStyle = "#fff";
    paint.lineWidth = Number(brush.value);
    paint.beginPath();
    paint.moveTo((from || to).x, (from || to).y);
    paint.lineTo(to.x + 0.01, to.y);
    paint.stroke();
    from = to;
    show();
  };
  const place = (event) => {
    const box = canvas.getBoundingClientRect();
    return {x: (event.clientX - box.left) * width / box.width, y: (event.clientY - box.top) * height / box.height};
  };
  canvas.addEventListener("pointerdown", (event) => {
    canvas.setPointerCapture(event.pointerId);
    keys = false;
    from = null;
    stroke(place(event));
  });
  canvas.addEventListener("pointermove", (event) => event.buttons && from && stroke(place(event)));
  canvas.addEventListener("pointerup", () => (from = null));
  canvas.addEventListener("keydown", (event) => {
    const step = Math.max(1, brush.value / 4);
    const move = {ArrowLeft: [-step, 0], ArrowRight: [step, 0], ArrowUp: [0, -step], ArrowDown: [0, step]}[event.key];
    if (move) {
      at = {x: Math.min(width, Math.max(0, at.x + move[0])), y: Math.min(height, Math.max(0, at.y + move[1]))};
      from = null;
    } else if (event.key === " " || event.key === "x") {
      from = null;
      stroke(at, event.key === "x");
    } else {
      return;
    }
    event.preventDefault();
    keys = true;
    show();
  });
  const invert = () => {
    paint.globalCompositeOperation = "xor";
    paint.fillStyle = "#fff";
    paint.fillRect(0, 0, width, height);
    show();
  };
  const clear = () => {
    paint.clearRect(0, 0, width, height);
    show();
  };
  put(dialog, h("form", {method: "dialog"},
    h("h2", {id: "mask-title"}, "Paint what is drawn anew"), canvas,
    h("div", {class: "tools"}, h("label", {for: "brush"}, "Brush"), brush,
      h("label", {class: "check"}, erase, " Erase"),
      h("button", {type: "button", onclick: invert}, "Invert"),
      h("button", {type: "button", onclick: clear}, "Clear")),
    h("small", {id: "mask-keys"}, "Paint with a pointer. Or arrow keys move the brush, space paints, X erases."),
    h("div", {class: "buttons"}, h("span"),
      h("button", {type: "button", onclick: () => dialog.close("")}, "Cancel"),  // Enter presses the first that submits
      h("button", {value: "use", class: "primary"}, "Use it"))));
  dialog.returnValue = "";
  dialog.showModal();
  canvas.focus();
  show();
  await new Promise((closed) => dialog.addEventListener("close", closed, {once: true}));
  if (dialog.returnValue !== "use") return undefined;
  const pixels = paint.getImageData(0, 0, width, height);
  let painted = false;
  for (let i = 0; i < pixels.data.length; i += 4) {
    const value = pixels.data[i + 3] >= 128 ? 255 : 0;
    painted = painted || value > 0;
    pixels.data.fill(value, i, i + 3);
    pixels.data[i + 3] = 255;
  }
  if (!painted) return null;
  paint.globalCompositeOperation = "source-over";
  paint.putImageData(pixels, 0, 0);
  return new Promise((done) => layer.toBlob(done, "image/png"));
}
