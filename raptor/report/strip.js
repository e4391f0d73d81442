"use strict";
// What the model sees: maps of patch tokens through depth, to scrub through.

const SVG = "http://www.w3.org/2000/svg";

function element(tag, properties = {}, ...children) {
  const node = document.createElement(tag);
  for (const [key, value] of Object.entries(properties)) {
    if (key.includes("-") || key === "role") node.setAttribute(key, value);
    else node[key] = value;
  }
  node.append(...children);
  return node;
}

class Strip {
  constructor(root, found) {
    this.root = root;
    this.found = found;
    this.states = found.num_layers + 1;
    this.layer = found.num_layers;
    this.image = 0;
    this.sides = found.images[0].surrogate ? ["teacher", "surrogate"] : ["teacher"];
    // A model without a surrogate is nobody's teacher: its row is called by what it shows.
    this.names = this.sides.length > 1 ? { teacher: "teacher", surrogate: "surrogate" } : { teacher: "patches" };
    root.style.setProperty("--states", this.states);
    root.append(this.head(), this.pictures(), element("div", { className: "film", tabIndex: 0, role: "group", "aria-label": "Every layer of the chosen image" }));
    this.film();
    this.show();
  }

  head() {
    this.slider = element("input", { type: "range", min: 0, max: this.states - 1, value: this.layer, id: "strip-depth" });
    this.output = element("output");
    this.output.setAttribute("for", "strip-depth");
    this.slider.addEventListener("input", () => this.go(Number(this.slider.value)));
    const scrub = element("label", { className: "control" }, element("span", { textContent: "Depth" }), this.slider, this.output);
    const downloads = element("div", { className: "downloads" });
    for (const kind of ["png", "svg", "csv"]) {
      const button = element("button", { type: "button", textContent: kind.toUpperCase(), "aria-label": `Download the maps as ${kind.toUpperCase()}` });
      button.dataset.download = kind;
      button.addEventListener("click", () => this.download(kind));
      downloads.append(button);
    }
    const controls = element("div", { className: "controls" }, scrub, playButton(() => this.go((this.layer + 1) % this.states)));
    return element("div", { className: "strip-head" }, controls, downloads);
  }

  pictures() {
    const images = this.found.images;
    const grid = element("div", { className: "pictures" });
    grid.style.setProperty("--images", images.length);
    this.buttons = images.map((row, i) => {
      const picture = element("img", { src: `data:image/png;base64,${row.image}`, alt: `Input image: ${row.label || row.name}` });
      const button = element("button", { type: "button", "aria-pressed": "false" }, picture);
      button.addEventListener("click", () => { this.image = i; this.film(); this.show(); });
      return button;
    });
    grid.append(element("div", { className: "row", textContent: "image" }), ...this.buttons);
    this.tiles = [];
    for (const side of this.sides) {
      grid.append(element("div", { className: "row", textContent: this.names[side] }));
      images.forEach((row) => {
        const tile = this.tile(row, side);
        this.tiles.push([tile, row, side]);
        grid.append(tile);
      });
    }
    grid.append(element("div", { className: "row", textContent: "" }), ...images.map((row) => element("div", { className: "name", textContent: row.label || row.name })));
    return grid;
  }

  tile(row, side) {
    const tile = element("div", { className: "tile", role: "img" });
    tile.style.backgroundImage = `url(data:image/png;base64,${row[side]})`;
    tile.style.backgroundSize = `${this.states * 100}% 100%`;
    return tile;
  }

  place(tile, layer) {
    tile.style.backgroundPosition = `${(100 * layer) / Math.max(1, this.states - 1)}% 0`;
  }

  film() {
    const film = this.root.querySelector(".film"), row = this.found.images[this.image];
    film.replaceChildren();
    this.frames = [];
    for (const side of this.sides) {
      const line = element("div", { className: "film-row" }, element("span", { textContent: this.names[side] }));
      for (let layer = 0; layer < this.states; layer++) {
        const tile = this.tile(row, side);
        this.place(tile, layer);
        tile.removeAttribute("role");
        const button = element("button", { type: "button", tabIndex: side === "teacher" ? 0 : -1, "aria-label": `${this.names[side]}, layer ${layer}` }, tile);
        button.addEventListener("click", () => this.go(layer));
        this.frames.push([button, layer]);
        line.append(button);
      }
      film.append(line);
    }
    const numbers = element("div", { className: "film-row", "aria-hidden": "true" }, element("span", { textContent: "layer" }));
    for (let layer = 0; layer < this.states; layer++) {
      const cell = element("button", { type: "button", className: "index", textContent: String(layer), tabIndex: -1 });
      cell.addEventListener("click", () => this.go(layer));
      const phase = phaseAt(layer);
      if (phase >= 0) cell.style.borderTopColor = css(`phase-${phase % 7}`);
      numbers.append(cell);
    }
    film.append(numbers);
  }

  go(layer) {
    this.layer = layer;
    this.slider.value = layer;
    this.show();
  }

  show() {
    const phase = phaseAt(this.layer), row = this.found.images[this.image];
    const match = row.cosine ? `, cosine ${short(row.cosine[this.layer])}` : "";
    this.output.textContent = `layer ${this.layer}${phase >= 0 ? `, phase ${phase + 1}` : ""}${match}`;
    this.tiles.forEach(([tile, image, side]) => {
      this.place(tile, this.layer);
      tile.setAttribute("aria-label", `${this.names[side]}, ${image.label || image.name}, layer ${this.layer}`);
    });
    this.buttons.forEach((button, i) => button.setAttribute("aria-pressed", String(i === this.image)));
    this.frames.forEach(([button, layer]) => button.setAttribute("aria-current", String(layer === this.layer)));
  }

  rows() {
    const rows = [["image", "label", "layer", "cosine of teacher and surrogate patches", "variance in the three colours"]];
    this.found.images.forEach((row) => {
      for (let layer = 0; layer < this.states; layer++) rows.push([row.name, row.label, layer, row.cosine?.[layer], this.found.explained?.[layer]]);
    });
    return rows;
  }

  // All images and layers as one picture: input left, then teacher above surrogate.
  picture() {
    const side = 56, gap = 3, left = 2 * side + 90, pair = this.sides.length * (side + gap) + 14;
    const width = left + this.states * (side + gap) + 16, height = 40 + this.found.images.length * pair + 12;
    const svg = document.createElementNS(SVG, "svg");
    const add = (parent, tag, attributes, text) => {
      const node = document.createElementNS(SVG, tag);
      for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
      if (text !== undefined) node.textContent = text;
      parent.append(node);
      return node;
    };
    const words = { "font-family": "system-ui, sans-serif", "font-size": 12, fill: css("soft") };
    for (const [key, value] of Object.entries({ xmlns: SVG, width, height, viewBox: `0 0 ${width} ${height}` })) svg.setAttribute(key, value);
    add(svg, "rect", { width, height, fill: css("paper") });
    for (let layer = 0; layer < this.states; layer++) add(svg, "text", { ...words, x: left + layer * (side + gap) + side / 2, y: 26, "text-anchor": "middle" }, layer ? String(layer) : "layer 0");
    this.found.images.forEach((row, i) => {
      const top = 38 + i * pair, large = this.sides.length * side + (this.sides.length - 1) * gap;
      add(svg, "image", { href: `data:image/png;base64,${row.image}`, x: 10, y: top, width: large, height: large });
      this.sides.forEach((shown, s) => {
        const y = top + s * (side + gap);
        add(svg, "text", { ...words, x: left - 10, y: y + side / 2 + 4, "text-anchor": "end" }, this.names[shown]);
        for (let layer = 0; layer < this.states; layer++) {
          const frame = add(svg, "svg", { x: left + layer * (side + gap), y, width: side, height: side, viewBox: `${layer} 0 1 1`, preserveAspectRatio: "none" });
          add(frame, "image", { href: `data:image/png;base64,${row[shown]}`, width: this.states, height: 1, preserveAspectRatio: "none", style: "image-rendering:pixelated" });
        }
      });
    });
    return { text: new XMLSerializer().serializeToString(svg), width, height };
  }

  async download(kind) {
    if (kind === "csv") return save("maps.csv", new Blob([toCsv(this.rows())], { type: "text/csv" }));
    const { text, width, height } = this.picture();
    if (kind === "svg") return save("maps.svg", new Blob([text], { type: "image/svg+xml" }));
    const image = new Image();
    image.src = `data:image/svg+xml;charset=utf-8,${encodeURIComponent(text)}`;
    await image.decode();
    const canvas = element("canvas", { width: 2 * width, height: 2 * height });
    canvas.getContext("2d").drawImage(image, 0, 0, canvas.width, canvas.height);
    canvas.toBlob((blob) => save("maps.png", blob));
  }
}

function phaseAt(layer) {
  let end = 0;
  return layer < 1 ? -1 : (page.phases || []).findIndex((length) => (end += length) >= layer);
}

function playButton(step) {
  const button = element("button", { type: "button", className: "play", textContent: "▶", "aria-label": "Play through depth" });
  let timer = null;
  button.addEventListener("click", () => {
    if (timer) { clearInterval(timer); timer = null; } else timer = setInterval(step, 450);
    button.textContent = timer ? "❚❚" : "▶";
    button.setAttribute("aria-label", timer ? "Stop" : "Play through depth");
  });
  return button;
}
