/** A worker's KV blocks as a map of cells. */

import { useEffect, useRef, useState } from "preact/hooks";
import { count, counted } from "../format.ts";
import { useShownTheme } from "../shell/theme.ts";
import { cleared } from "./canvas.ts";
import { useWidth } from "../shell/width.ts";

/** State, colour and name, in the order of the legend. */
export const CELLS: [string, string, string][] = [
  ["u", "--c-blue", "in use"],
  ["s", "--c-orange", "shared"],
  ["p", "--c-purple", "pinned"],
  ["c", "--c-sky", "cached"],
  [".", "--line", "free"],
];
const MAX_HEIGHT = 168;
const SIZES = [14, 12, 10, 8, 7, 6, 5, 4, 3];

interface Props {
  title: string;
  cells: string;
  blocksPerCell: number;
  numBlocks: number;
}

export function BlockMap({ title, cells, blocksPerCell, numBlocks }: Props) {
  const canvas = useRef<HTMLCanvasElement>(null);
  const [width, box] = useWidth();
  const [pointed, setPointed] = useState("");
  const size = SIZES.find((one) => Math.ceil(cells.length / columns(width, one)) * one <= MAX_HEIGHT) ?? 3;
  const perRow = columns(width, size);
  const height = Math.ceil(cells.length / perRow) * size;
  const theme = useShownTheme();
  useEffect(() => {
    if (canvas.current) draw(canvas.current, cells, perRow, size, width, height);
  }, [cells, perRow, size, width, height, theme]);
  const counts = countCells(cells);
  const unit = blocksPerCell === 1 ? "" : ` (a cell stands for ${blocksPerCell} blocks and has the color of the most used one)`;
  const amount = (state: string) => {
    const number = counts[state] ?? 0;
    return blocksPerCell === 1 ? count(number) : counted(number, "cell");
  };
  const said = CELLS.map(([state, , name]) => `${name} ${amount(state)}`).join(", ");
  const move = (event: PointerEvent) => {
    const index = Math.floor(event.offsetY / size) * perRow + Math.floor(event.offsetX / size);
    const state = CELLS.find(([one]) => one === cells[index]);
    if (!state) return setPointed("");
    // Block ids begin at 1.
    const [first, last] = [1 + index * blocksPerCell, Math.min((index + 1) * blocksPerCell, numBlocks)];
    setPointed(`${first === last ? `block ${first}` : `blocks ${first}–${last}, the most used one`}: ${state[2]}`);
  };
  return (
    <figure class="block-map">
      <figcaption>
        {title}: {counted(numBlocks, "block")}
        <span class="muted">{unit}</span>
      </figcaption>
      <div ref={box}>
        <canvas
          ref={canvas}
          role="img"
          aria-label={`${title}: ${said}${unit}`}
          onPointerMove={move}
          onPointerLeave={() => setPointed("")}
        />
      </div>
      <p class="legend num">
        {CELLS.map(([state, color, name]) => (
          <span key={state}>
            <i style={{ background: `var(${color})` }} />
            {name} {amount(state)}
          </span>
        ))}
        <span class="muted">{pointed}</span>
      </p>
    </figure>
  );
}

function columns(width: number, size: number): number {
  return Math.max(1, Math.floor(width / size));
}

export function countCells(cells: string): Record<string, number> {
  const counts: Record<string, number> = {};
  for (const state of cells) counts[state] = (counts[state] ?? 0) + 1;
  return counts;
}

function draw(
  canvas: HTMLCanvasElement,
  cells: string,
  perRow: number,
  size: number,
  width: number,
  height: number,
): void {
  const context = cleared(canvas, width, height);
  if (!context) return;
  const style = getComputedStyle(document.documentElement);
  const gap = size > 4 ? 1 : 0.5;
  for (const [state, color] of CELLS) {
    context.fillStyle = style.getPropertyValue(color);
    for (let index = 0; index < cells.length; index++) {
      if (cells[index] !== state) continue;
      const [x, y] = [(index % perRow) * size, Math.floor(index / perRow) * size];
      context.fillRect(x, y, size - gap, size - gap);
    }
  }
}
