// What each try has brought: "read" with what was read, "opaque" if it was sent and cannot be read, or "no".
(async () => {
  const target = %s, bodies = %s, told = {};
  const tried = async (name, work) => { try { told[name] = await work(); } catch (error) { told[name] = "no"; } };
  const read = (response) => response.type === "opaque" ? "opaque" : response.text().then((text) => `read ${response.status} ${text}`);
  for (const path in bodies) {
    const body = JSON.stringify(bodies[path]);
    for (const mode of ["cors", "no-cors"])
      for (const type of ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data"])
        await tried(`POST ${path} ${mode} ${type}`, () => fetch(target + path, { method: "POST", mode, headers: { "Content-Type": type }, body }).then(read));
    await tried(`POST ${path} json`, () => fetch(target + path, { method: "POST", headers: { "Content-Type": "application/json" }, body }).then(read));
    await tried(`beacon ${path}`, async () => `${navigator.sendBeacon(target + path, body)}`);
  }
  for (const path of ["", "v1/models", "health", "metrics", "page/bytes?die=0", "page/frames"])
    for (const mode of ["cors", "no-cors"])
      await tried(`GET ${path} ${mode}`, () => fetch(target + path, { mode }).then(read));
  await tried("EventSource", () => new Promise((resolve) => {
    const source = new EventSource(target + "page/frames");
    source.addEventListener("hello", () => resolve("read hello"));
    source.onerror = () => { source.close(); resolve("no"); };
  }));
  for (const kind of ["script", "img", "iframe"])
    await tried(kind, () => new Promise((resolve) => {
      const element = document.createElement(kind);
      element.onload = () => resolve(kind === "iframe" ? String(element.contentDocument?.body?.textContent ?? "opaque") : "opaque");
      element.onerror = () => resolve("no");
      element.src = target + "v1/models";
      document.body.append(element);
    }));
  document.forms[0].action = target + "page/break";
  document.forms[0].submit();
  await new Promise((resolve) => setTimeout(resolve, 300));
  return told;
})()
