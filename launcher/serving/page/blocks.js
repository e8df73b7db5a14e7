// The map of the cache: a cell for each block, or for several where there are more than the server tells apart.

import { begin, colour } from "./canvas.js";
import { count, number } from "./format.js";

const MOST_HEIGHT = 240;
const SIZES = [16, 14, 12, 10, 9, 8, 7, 6, 5, 4, 3, 2];

export class BlockMap {
  /** onslot: called with the slot under the pointer, or null. */
  constructor(canvas, readout, onslot) {
    this.canvas = canvas;
    this.readout = readout;
    this.onslot = onslot;
    this.cells = [];
    this.blocks = null;
    this.lit = null;
    this.pointer = null;
    canvas.addEventListener("pointermove", (event) => this.point([event.offsetX, event.offsetY]));
    canvas.addEventListener("pointerleave", () => this.point(null));
  }

  /** Show a map of /v1/engine; nameOf: the request in a slot, as people see it. */
  update(blocks, nameOf) {
    this.blocks = blocks;
    this.nameOf = nameOf;
    this.cells = blocks.runs.flatMap(([cells, ...cell]) => Array(cells).fill(cell));
    this.draw();
    this.point(this.pointer);
  }

  /** Have the blocks of one slot stand out; null is none. */
  light(slot) {
    if (slot === this.lit) return;
    this.lit = slot;
    this.draw();
  }

  draw() {
    if (this.blocks === null) return;
    const room = begin(this.canvas, 1).width;
    const fits = (size) => Math.ceil(this.cells.length / Math.floor(room / size)) * size <= MOST_HEIGHT;
    this.size = SIZES.find(fits) ?? SIZES.at(-1);
    this.columns = Math.floor(room / this.size);
    const rows = Math.ceil(this.cells.length / this.columns);
    const { context } = begin(this.canvas, rows * this.size);
    const colours = { free: colour("free"), cached: colour("cached"), used: colour("used"), shared: colour("shared"), lit: colour("text") };
    const side = this.size - (this.size > 4 ? 2 : 1);
    this.cells.forEach((cell, index) => {
      const x = (index % this.columns) * this.size;
      const y = Math.floor(index / this.columns) * this.size;
      const fill = (name, share) => {
        if (share === 0) return;
        context.globalAlpha = share;
        context.fillStyle = colours[name];
        context.fillRect(x, y, side, side);
      };
      const [used, shared, cached, slot] = cell;
      const per = this.blocksOf(index);
      fill("free", 1);
      // Of several blocks each state covers as much as its share, but one used block is never quite lost.
      fill("cached", cached / per);
      fill("used", used > shared ? Math.max(0.25, (used - shared) / per) : 0);
      fill("shared", shared > 0 ? Math.max(0.25, shared / per) : 0);
      context.globalAlpha = 1;
      if (this.lit !== null && slot === this.lit) {
        context.strokeStyle = colours.lit;
        context.lineWidth = Math.min(2, side / 3);
        context.strokeRect(x + 0.5, y + 0.5, side - 1, side - 1);
      }
    });
  }

  blocksOf(index) {
    const { number: total, blocks_per_cell: per } = this.blocks;
    return Math.min(per, total - index * per);
  }

  point(place) {
    this.pointer = place;
    const cell = place === null ? null : this.cellAt(place);
    this.readout.textContent = cell === null ? this.summary() : this.describe(cell);
    this.onslot(cell === null ? null : this.cells[cell][3]);
  }

  cellAt([x, y]) {
    const column = Math.floor(x / this.size);
    const index = Math.floor(y / this.size) * this.columns + column;
    return column < this.columns && index >= 0 && index < this.cells.length ? index : null;
  }

  summary() {
    if (this.blocks === null) return "";
    const { number: total, block_size: size, blocks_per_cell: per } = this.blocks;
    const cells = per > 1 ? `; each cell stands for ${per}` : "";
    return `${count(total, "block")} of ${count(size, "token")}${cells}. Point at one to see whose it is.`;
  }

  describe(index) {
    const [used, shared, cached, slot] = this.cells[index];
    const first = index * this.blocks.blocks_per_cell;
    const here = this.blocksOf(index);
    const name = here === 1 ? `Block ${first}` : `Blocks ${first} to ${first + here - 1}`;
    const holder = slot === null ? "" : ` by ${this.nameOf(slot)}`;
    const states = [
      [used - shared, `used${holder}`],
      [shared, "used by several requests"],
      [cached, "cached: free, and findable by its prefix"],
      [here - used - cached, "free"],
    ].filter(([blocks]) => blocks > 0);
    return `${name}: ${states.map(([blocks, text]) => (here === 1 ? text : `${number(blocks)} ${text}`)).join(", ")}`;
  }
}
