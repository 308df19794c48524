import { useEffect, useRef, useState } from "preact/hooks";
import type { RefObject } from "preact";

/** The width of an element in CSS pixels, for a canvas in it. */
export function useWidth(): [number, RefObject<HTMLDivElement | null>] {
  const box = useRef<HTMLDivElement>(null);
  const [width, setWidth] = useState(300);
  useEffect(() => {
    if (!box.current) return;
    const observer = new ResizeObserver(([entry]) => {
      if (entry) setWidth(Math.floor(entry.contentRect.width));
    });
    observer.observe(box.current);
    return () => observer.disconnect();
  }, []);
  return [width, box];
}
