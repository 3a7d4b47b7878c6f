(() => {
  const live = document.getElementById("live"), mark = document.getElementById("mark");
  let busy = false, again = false;
  const say = (look, text) => { mark.className = "mark " + look; mark.textContent = text; };
  // The server draws; this only puts the drawing in its place.
  async function draw() {
    if (busy) { again = true; return; }
    busy = true;
    try {
      const from = new URL(location.href);
      from.searchParams.set("part", "live");
      const answer = await fetch(from, {cache: "no-store", signal: AbortSignal.timeout(10000)});
      if (!answer.ok) throw new Error(answer.status);
      live.innerHTML = await answer.text();
      say("on", "live");
    } catch (_) {
      say("off", "no answer, trying on");
    }
    busy = false;
    if (again) { again = false; draw(); }
  }
  function listen() {
    const now = live.querySelector("[data-revision]");
    const news = new EventSource("api/v1/watch?since=" + (now ? now.dataset.revision : 0));
    news.addEventListener("workers", draw);
    news.onopen = () => say("on", "live");
    news.onerror = () => {
      say("off", "no answer, trying on");
      // Closed for good: this revision is not known any more, or the server is busy.
      if (news.readyState === EventSource.CLOSED) setTimeout(() => draw().then(listen), 2000);
    };
  }
  listen();
  setInterval(() => { if (!document.hidden) draw(); }, 5000);
})();
