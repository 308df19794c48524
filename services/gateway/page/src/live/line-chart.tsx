/** A small chart of the last minute: lines, a number, and marks where something changed. */

import { WINDOW_S, type Mark } from "./history.ts";

export interface Series {
  label: string;
  /** The shown number. */
  value: string;
  color: string;
  /** A dash pattern besides the colour, so that lines differ without colours. */
  dash?: string;
  values: (number | null)[];
}

interface Props {
  title: string;
  series: Series[];
  times: number[];
  nowS: number;
  marks: Mark[];
  format: (value: number) => string;
  /** The top of the chart if no value is larger. */
  least?: number;
  /** A line under the numbers. */
  note?: string;
  /** A name by which tests find the numbers. */
  name: string;
}

const WIDTH = 240;
const HEIGHT = 56;

export function LineChart({ title, series, times, nowS, marks, format, least = 0, note, name }: Props) {
  const top = Math.max(least, ...series.flatMap((one) => one.values.map((value) => value ?? 0)));
  const x = (atS: number) => WIDTH * (1 - (nowS - atS) / WINDOW_S);
  const y = (value: number) => HEIGHT - 2 - (HEIGHT - 6) * (top ? value / top : 0);
  const said = series.map((one) => `${one.label} ${one.value}`.trim()).join(", ");
  return (
    <section class={`card chart ${series.length > 1 ? "wide" : ""}`} aria-label={title} data-name={name}>
      <h3>{title}</h3>
      <p class="chart-values num">
        {series.map((one) => (
          <span key={one.label} class="chart-value">
            {series.length > 1 && (
              <span class="chart-label muted">
                {one.label}{" "}
                <svg class="key" viewBox="0 0 18 6" aria-hidden="true">
                  <line x1="0" x2="18" y1="3" y2="3" stroke={one.color} stroke-width="3" stroke-dasharray={one.dash} />
                </svg>
              </span>
            )}
            <strong data-series={one.label}>{one.value}</strong>
          </span>
        ))}
      </p>
      <p class="muted chart-note">{note || "\u00a0"}</p>
      <p class="plot-top muted num" aria-hidden="true">
        0 to {format(top)}
      </p>
      <div class="plot">
        <svg
          viewBox={`0 0 ${WIDTH} ${HEIGHT}`}
          preserveAspectRatio="none"
          role="img"
          aria-label={`${title}, the last ${WINDOW_S} s. Now: ${said}. The chart goes up to ${format(top)}`}
        >
          <line class="axis" x1="0" x2={WIDTH} y1={HEIGHT - 1} y2={HEIGHT - 1} />
          {marks.map((mark) => (
            <line key={mark.atS} class="mark" x1={x(mark.atS)} x2={x(mark.atS)} y1="0" y2={HEIGHT}>
              <title>{mark.text}</title>
            </line>
          ))}
          {series.map((one) => (
            <path
              key={one.label}
              d={path(one.values, times, x, y)}
              fill="none"
              stroke={one.color}
              stroke-width="2"
              stroke-dasharray={one.dash}
              vector-effect="non-scaling-stroke"
              stroke-linejoin="round"
            />
          ))}
        </svg>
      </div>
    </section>
  );
}

/** An SVG path with gaps where there is no value, or where snapshots were missed. */
function path(
  values: (number | null)[],
  times: number[],
  x: (atS: number) => number,
  y: (value: number) => number,
): string {
  let d = "";
  let open = false;
  values.forEach((value, index) => {
    const atS = times[index] ?? 0;
    if (value === null) {
      open = false;
      return;
    }
    if (atS - (times[index - 1] ?? atS) > 3) open = false;
    d += `${open ? "L" : "M"}${x(atS).toFixed(1)} ${y(value).toFixed(1)}`;
    open = true;
  });
  return d;
}
